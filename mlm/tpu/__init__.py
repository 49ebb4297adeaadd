"""Programs for TPUs that are not there: which ones there are, the compiler's text of a program, and what it costs."""
