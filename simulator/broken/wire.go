package broken

// wire are the mutations of what every request and answer has.
var wire = []Mutation{
	{
		Name: "A01-no-code", Rule: "A01", Says: "errors have no error_code",
		After: func(x *Exchange) {
			if x.Answer.Status >= 400 {
				x.EditBody(func(body map[string]any) { delete(body, "error_code") })
			}
		},
	},
	{
		Name: "A01-taken-name-is-conflict", Rule: "A01", Says: "a name that is taken is 409 Conflict",
		After: func(x *Exchange) {
			if x.Refused(400, "ObjectAlreadyExists") {
				x.Answer.Status = 409
				x.EditBody(func(body map[string]any) { body["error_code"] = "Conflict" })
			}
		},
	},
}
