"""A system of the benchmarks in this process, in the place of one in a process of its own."""

from benchmarks.peers.worker import Server


class WorkerHere(Server):
    """A worker in this process."""

    def __init__(self, system, *, threads):
        super().__init__(system)
        self.threads = threads

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def call(self, name, **arguments):
        return getattr(self, name)(**arguments)

    def send(self, name, **arguments):
        self.answer = self.call(name, **arguments)

    def receive(self):
        return self.answer
