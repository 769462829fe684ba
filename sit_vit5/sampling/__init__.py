"""From a network and noise to images: guidance, solvers, grids, sets of samples."""
