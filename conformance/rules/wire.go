package rules

import "slices"

// wireRules are about what every request and every answer has: errors, names, bodies, pages,
// versions, tokens, and that a request is a saga.
var wireRules = slices.Concat(errorRules, nameRules, bodyRules, pageRules, alikeRules,
	accessRules, sagaRules)
