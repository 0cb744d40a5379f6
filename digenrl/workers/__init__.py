"""What a worker does when it is told to: orders in, reports out, tensors through the exchange."""
