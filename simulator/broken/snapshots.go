package broken

var snapshots []Mutation
