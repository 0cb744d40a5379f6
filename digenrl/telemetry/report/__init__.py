"""A run's folder as one page to open in a browser: read it, reckon its figures, write `report.html`."""
