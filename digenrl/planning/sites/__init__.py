"""Clusters of several sites with slow links in between."""
