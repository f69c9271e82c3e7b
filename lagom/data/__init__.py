"""Tables on disk as data sets."""
