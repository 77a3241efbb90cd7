"""Real processes that are really killed: a coordinator, engines that lend and borrow, and a network that fails."""
