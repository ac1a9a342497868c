"""Stores that count their requests, or lose the process that uses them in the middle."""


class Lost(BaseException):
    """The process is gone: it makes no more requests."""


class Counted:
    """A store that counts the requests made of it."""

    def __init__(self, inner):
        self.inner, self.num_requests = inner, 0

    def __getattr__(self, name):
        def call(*args):
            self.num_requests += 1
            self.before()
            return getattr(self.inner, name)(*args)

        return call

    def before(self):
        """Of each request."""


class Cut(Counted):
    """A store whose user is lost just before a request."""

    def __init__(self, inner, fuse):
        super().__init__(inner)
        self.fuse = fuse

    def before(self):
        if self.num_requests >= self.fuse:
            raise Lost
