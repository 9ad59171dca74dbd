"""From a staged folder to a committed one, and from many committed ones to the few that are kept."""
