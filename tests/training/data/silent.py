"""A progress that remembers what it was told and shows nothing."""


class Silent:
    def __init__(self):
        self.messages, self.works = [], []

    def message(self, text):
        self.messages.append(text)

    def work(self, what, done, total, status):
        self.works.append((what, done, total, status))

    def stop(self):
        pass
