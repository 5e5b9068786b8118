package broken

var disks []Mutation
