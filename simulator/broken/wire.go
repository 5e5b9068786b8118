package broken

import "slices"

// wire are the mutations of what every request and answer has.
var wire = slices.Concat(wireErrors, wireNames, wireBodies, wirePages, wireAlike, wireAccess,
	wireSagas)
