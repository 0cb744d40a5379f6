"""A runtime with a virtual clock: it drives the production scheduler and answers what a schedule costs."""
