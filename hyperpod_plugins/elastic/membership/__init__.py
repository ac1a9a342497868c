"""Who belongs to the job, who may come, and who is to leave."""
