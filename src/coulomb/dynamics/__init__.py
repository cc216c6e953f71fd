"""Moving the particles: starting laws, samplers, the run loop, stopping, resampling."""
