"""Tasks on a process pool of this machine, or on a Dask cluster."""
