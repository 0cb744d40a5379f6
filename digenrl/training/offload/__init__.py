"""Offloads what only training needs to host memory, and keeps the last version's state there."""
