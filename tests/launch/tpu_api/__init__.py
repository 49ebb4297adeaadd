"""A TPU API of the tests' own: a model that processes share through a folder, and a server for the real gcloud."""
