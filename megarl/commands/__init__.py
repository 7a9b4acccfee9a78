"""What the command line does besides training: convert, dry run, samples from and into files, trying a reward."""
