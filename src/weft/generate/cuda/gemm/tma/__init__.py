"""Products on Hopper: TMA fills a ring of stages, warpgroups multiply them."""
