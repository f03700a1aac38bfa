"""report.html and its figures: data.py gathers what they show, report.py writes the page. Imports no torch."""
