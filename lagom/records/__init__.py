"""What is kept of a run: a folder of text, and a page made of it."""
