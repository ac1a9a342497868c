"""Which workers belong to the job, which may join, and which leave."""
