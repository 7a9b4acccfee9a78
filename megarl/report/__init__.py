"""The page of a run: one HTML file with its curves, its placement, its recipe and its samples.

`run_files` reads a run's folder, `recipe_rows` and `planned` add what follows from its recipe, `run_data` joins these
into one JSON object for each run, and `page` writes the file. What a run's files hold is data everywhere: the page's
own program (`page_parts/`) writes it as text.
"""
