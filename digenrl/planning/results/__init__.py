"""Plans, why they won, and how they are shown and applied."""
