"""One module for each part of the page: records in, a section out."""
