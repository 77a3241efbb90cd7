"""Messages, frames and connections between the router, its instances and stages; checks of orders."""
