"""`doctor`: checks the data and the settings of a run before it starts."""
