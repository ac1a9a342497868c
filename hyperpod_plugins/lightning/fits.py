"""Whether this process has been through a fit."""


class Fits:
    """Of one process."""

    def __init__(self) -> None:
        self.is_over = False
        """Whether a fit that could be repaired in place has come to its end."""


fits = Fits()
