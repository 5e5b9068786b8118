package broken

var guests []Mutation
