"""A meter as many training programs have one: a plain object of a class that no library knows."""


class Meter:
    """The mean of what it is given."""

    def __init__(self):
        self.n, self.mean = 0, 0.0

    def update(self, value):
        self.n += 1
        self.mean += (value - self.mean) / self.n
