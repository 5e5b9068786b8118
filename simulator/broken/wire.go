package broken

import "slices"

// wire are the mutations that concern every request and answer.
var wire = slices.Concat(wireErrors, wireNames, wireBodies, wirePages, wireAlike, wireAccess,
	wireSagas)
