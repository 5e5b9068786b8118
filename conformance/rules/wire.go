package rules

import "slices"

// wireRules are about every request and every answer: errors, names, bodies, pages, versions,
// tokens, and the saga behind a request.
var wireRules = slices.Concat(errorRules, nameRules, bodyRules, pageRules, alikeRules,
	accessRules, sagaRules)
