"""The code that runs in a worker: it opens the dataset, fetches, collates, answers."""
