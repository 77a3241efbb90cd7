"""Messages, frames and connections between the front, its instances and stages; checks of orders."""
