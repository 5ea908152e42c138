"""What a dataset looks like: statistics, samples of its rows, single examples, repeated ones, and the page about it."""
