"""`doctor`: what can be wrong with a run, looked for before anything is paid for."""
