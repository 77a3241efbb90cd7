"""What a service does now: rows of live requests, the feed of their changes, and the page that shows them."""
