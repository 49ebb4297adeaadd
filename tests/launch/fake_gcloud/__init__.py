"""A stand-in for gcloud, for machines without it and for tests that ask it hundreds of times."""
