"""Records to figures and pages; the only user of matplotlib."""
