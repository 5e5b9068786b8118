package broken

var instances []Mutation
