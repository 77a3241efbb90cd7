"""Real processes that are killed: a coordinator, engines that lend and borrow, and a network that fails."""
