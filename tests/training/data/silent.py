"""A progress that remembers what it was told and shows nothing."""

from stacked_remat.training import Progress


class Silent(Progress):
    def __init__(self):
        self.messages, self.works = [], []

    def message(self, text):
        self.messages.append(text)

    def work(self, what, done, total, status):
        self.works.append((what, done, total, status))

    def start(self, num_steps):
        pass

    def advance(self, step, loss, tokens_per_second):
        pass

    def stop(self):
        pass
