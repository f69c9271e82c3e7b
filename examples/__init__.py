"""Short programs, each run as a script. A package, as petastorm installs one of this name that would be found first."""
