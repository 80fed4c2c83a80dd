"""What is measured: shapes, networks and problems, and their checks against float64; suites and tests share them."""
