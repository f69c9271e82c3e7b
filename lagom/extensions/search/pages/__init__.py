"""Parts of the page about a search, as HTML and SVG made here: start at ``search_page.py``."""
