"""What the processes of a run did in a step, as spans on one clock, and the file in which Perfetto shows them."""
