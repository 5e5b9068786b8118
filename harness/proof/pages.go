package proof

// pageBytes is the unit in which files are compared and forged.
const pageBytes = 4096
