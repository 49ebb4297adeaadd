"""The processes of one run, on one host or on many: how they meet, agree, stop together, and what each leaves."""
