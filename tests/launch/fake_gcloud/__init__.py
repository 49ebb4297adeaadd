"""A stand-in for gcloud, for machines without it and for tests that start it hundreds of times."""
