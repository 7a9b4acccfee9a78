"""Worker processes that run users' functions: started, fed with jobs, ended by limits of time and memory, replaced."""
