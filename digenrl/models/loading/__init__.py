"""From a folder, a hub id or a file to the components of a pipeline."""
